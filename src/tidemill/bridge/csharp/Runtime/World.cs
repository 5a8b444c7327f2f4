using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;

namespace Tidemill
{
    /// <summary>Chooses the actions of one decision where no trainer is connected.</summary>
    public delegate void Heuristic(Decision decision);

    /// <summary>Is told each action as it arrives; called by <see cref="Bridge.Exchange"/> on its thread.</summary>
    public interface IActuator
    {
        void Act(ActionEvent action);
    }

    /// <summary>
    /// A group of agents with observations and actions of equal shapes. Decisions may be requested from many threads at once; what reads or changes the
    /// whole world (<see cref="Bridge.Exchange"/>, <see cref="Actions"/>) is called while no thread requests anything. <see cref="ForJobs"/> is for jobs.
    /// </summary>
    public sealed unsafe class World
    {
        internal readonly Store* Store;
        internal readonly float[][] Observations; // of decisions, for the heuristic
        internal readonly float[] ContinuousActions;
        internal readonly int[] DiscreteActions;
        internal readonly int[] ObservationSizes;
        internal readonly int[] BranchStarts;
        internal readonly int MaskSize;
        private readonly int[][] observationShapes;
        private readonly int[] branches;
        private readonly int[] actingAgents;

        /// <param name="name">1 to 63 ASCII characters; what the trainer calls the group.</param>
        /// <param name="maxAgents">Decisions between two exchanges at most, and as many ended episodes; both together where the trainer has layout 0.</param>
        /// <param name="observationShapes">A shape of one to three sizes per observation.</param>
        /// <param name="continuousSize">Continuous actions of a decision.</param>
        /// <param name="branches">Sizes of the discrete branches.</param>
        public World(string name, int maxAgents, int[][] observationShapes, int continuousSize, params int[] branches)
        {
            CheckName(name);
            Require(maxAgents >= 1, name, "maxAgents is " + maxAgents + "; a world has room for one agent at least");
            Require(observationShapes != null && branches != null, name, "observationShapes and branches may be empty, not null");
            Require(continuousSize >= 0, name, "continuousSize is " + continuousSize);
            Name = name;
            MaxAgents = maxAgents;
            ContinuousSize = continuousSize;
            this.branches = (int[])branches.Clone();
            this.observationShapes = new int[observationShapes.Length][];
            ObservationSizes = new int[observationShapes.Length];
            BranchStarts = new int[branches.Length];
            long floats = 0;
            for (int k = 0; k < observationShapes.Length; k++)
            {
                ObservationSizes[k] = SizeOf(name, k, observationShapes[k]);
                this.observationShapes[k] = (int[])observationShapes[k].Clone();
                floats += ObservationSizes[k];
            }
            long choices = 0;
            for (int b = 0; b < branches.Length; b++)
            {
                Require(branches[b] >= 1, name, "branch " + b + " has " + branches[b] + " actions; it needs one at least");
                BranchStarts[b] = (int)Math.Min(choices, int.MaxValue);
                choices += branches[b];
            }
            long rowSize = 8 * floats + 64 + 2 * choices + 4L * continuousSize + 4L * branches.Length;
            Require(rowSize <= (int.MaxValue - 65536) / maxAgents, name, "it would take over 2 GiB of shared memory; fewer agents or smaller observations");
            MaskSize = (int)choices;
            Observations = new float[ObservationSizes.Length][];
            ContinuousActions = new float[maxAgents * continuousSize];
            DiscreteActions = new int[maxAgents * branches.Length];
            actingAgents = new int[maxAgents];
            Store = Tidemill.Store.Make(maxAgents, ObservationSizes, continuousSize, branches);
        }

        ~World()
        {
            Marshal.FreeHGlobal((IntPtr)Store);
        }

        public string Name { get; }

        /// <summary>Decisions that fit between two exchanges, and as many ended episodes; both together where the trainer has layout 0.</summary>
        public int MaxAgents { get; }

        public int ContinuousSize { get; }

        public int ObservationCount { get { return ObservationSizes.Length; } }

        public int BranchCount { get { return branches.Length; } }

        /// <summary>Who decides without a trainer; nobody (null) leaves all actions zero.</summary>
        public Heuristic Heuristic { get; set; }

        /// <summary>Told each action as it arrives, in no particular order.</summary>
        public IActuator Actuator { get; set; }

        /// <summary>The shape of observation `k`.</summary>
        public int[] ObservationShape(int k)
        {
            return (int[])observationShapes[k].Clone();
        }

        /// <summary>The number of actions of a branch.</summary>
        public int BranchSize(int branch)
        {
            return branches[branch];
        }

        /// <summary>
        /// Ask for an action of this agent; what is not set of the request is zero, and no action is forbidden. Safe from many threads at once. One request
        /// per agent between two exchanges.
        /// </summary>
        /// <exception cref="BridgeException">More requests than the world has room for.</exception>
        public Request RequestDecision(int agentId)
        {
            return NewRequest(false, agentId, 0);
        }

        /// <summary>The agent's episode has ended: set its last reward and observation on what this returns. Its id may come again in a later exchange.</summary>
        public Request EndEpisode(int agentId)
        {
            return NewRequest(true, agentId, 0);
        }

        /// <summary>The agent's episode was broken off (a limit of steps, not an end of its own): set its last reward and observation.</summary>
        public Request InterruptEpisode(int agentId)
        {
            return NewRequest(true, agentId, 1);
        }

        /// <summary>This world for jobs: a struct without references.</summary>
        public JobWorld ForJobs()
        {
            return new JobWorld(Store);
        }

        /// <summary>The actions that the last exchange brought, one for each decision requested before it; they hold until the next.</summary>
        public IEnumerable<ActionEvent> Actions
        {
            get
            {
                for (int row = 0; row < ActionCount; row++)
                {
                    yield return new ActionEvent(this, actingAgents[row], row);
                }
            }
        }

        /// <summary>How many <see cref="Actions"/> there are.</summary>
        public int ActionCount { get { return Store->Acting; } }

        /// <summary>The action of a row from 0 to <see cref="ActionCount"/> - 1.</summary>
        public ActionEvent Action(int row)
        {
            if (row < 0 || row >= ActionCount)
            {
                throw new ArgumentOutOfRangeException("row", row, "The world '" + Name + "' has " + ActionCount + " actions.");
            }
            return new ActionEvent(this, actingAgents[row], row);
        }

        internal bool HasRequests { get { return Store->Decisions.Count + Store->Ends.Count > 0; } }

        internal int DecisionCount { get { return Store->Decisions.Count; } }

        /// <summary>Counts exchanges: requests made before the last one cannot be changed any more, and actions not be read.</summary>
        internal int Exchange { get { return Store->Exchange; } }

        /// <summary>The reward of a decision.</summary>
        internal float Reward(int row)
        {
            return Store->Decisions.Rewards[row];
        }

        /// <summary>Whose decision a row is.</summary>
        internal int Deciding(int row)
        {
            return Store->Decisions.Ids[row];
        }

        /// <summary>Whether a decision must not take this action.</summary>
        internal bool IsForbidden(int row, int branch, int action)
        {
            return Store->Decisions.Masks[(long)row * MaskSize + BranchStarts[branch] + action] != 0;
        }

        private Request NewRequest(bool ended, int agentId, byte interrupted)
        {
            int row = Tidemill.Store.Take(Store, ended ? &Store->Ends : &Store->Decisions, agentId, interrupted);
            if (row < 0)
            {
                throw Full(agentId, ended);
            }
            return new Request(this, ended, row);
        }

        private BridgeException Full(int agentId, bool ended)
        {
            string room = "The world '" + Name + "' has room for " + MaxAgents + " agents between two exchanges, and one more ";
            if (Store->Shared == 0)
            {
                return new BridgeException(room + (ended ? "has ended" : "was requested") + " (agent " + agentId
                    + "). Give it a larger maxAgents, or tell of each agent once between two exchanges.");
            }
            return new BridgeException(room + "was told of (agent " + agentId + "): in layout 0 those that ask and those that end share it. Give it a larger maxAgents, and tell "
                + "the trainer how many agents live at a time, seats={\"" + Name + "\": ...}; or choose layout 0.3.2 in the trainer, where the two are counted apart.");
        }

        /// <summary>Decisions and ends have room for `MaxAgents` together from now on.</summary>
        internal void Share()
        {
            Store->Shared = 1;
            Store->Decisions.Attempts = Store->Decisions.Count + Store->Ends.Count;
        }

        /// <summary>What jobs got wrong since the last exchange, or that more was requested before the room was shared than fits; null: nothing.</summary>
        internal BridgeException TakeFault()
        {
            if (Store->Fault != 0)
            {
                var fault = (Fault)Store->Fault;
                Store->Fault = 0;
                return Wrong(fault, Store->FaultAgent, Store->FaultValue);
            }
            bool tooMany = Store->Shared != 0 && Store->Decisions.Count + Store->Ends.Count > MaxAgents;
            return tooMany ? Full(Store->Ends.Count > 0 ? Store->Ends.Ids[0] : Store->Decisions.Ids[0], true) : null;
        }

        private BridgeException Wrong(Fault fault, int agent, int value)
        {
            string who = "The world '" + Name + "': ";
            switch (fault)
            {
                case Fault.Full:
                    return Full(agent, value != 0);
                case Fault.Stale:
                    return new BridgeException(who + "a job has set a request of an exchange before; make a new one.");
                case Fault.NoObservation:
                    return new BridgeException(who + "a job has set observation " + value + " of agent " + agent + "; there are " + ObservationCount + ".");
                case Fault.WrongSize:
                    return new BridgeException(who + "a job has set observation " + value + " of agent " + agent + " by another number of values than " + ObservationSizes[value] + ".");
                case Fault.MaskOfEnded:
                    return new BridgeException(who + "a job has forbidden an action of agent " + agent + ", which has ended.");
                case Fault.NoChoice:
                    return new BridgeException(who + "a job has forbidden an action of agent " + agent + " that branch " + value + " does not have.");
                default:
                    return new BridgeException(who + "a job has read number " + value + " of action " + agent + ", which is not there.");
            }
        }

        /// <summary>Forget what was requested, and the actions.</summary>
        internal void Drop()
        {
            Store->Acting = 0;
            Tidemill.Store.Drop(Store);
        }

        /// <summary>The actions of all requested decisions are in place: tell the actuator, and begin anew.</summary>
        internal void ActionsArrived()
        {
            int acting = DecisionCount;
            Store->Acting = acting;
            Marshal.Copy((IntPtr)Store->Decisions.Ids, actingAgents, 0, acting);
            Marshal.Copy(actingAgents, 0, (IntPtr)Store->ActingIds, acting);
            Marshal.Copy(ContinuousActions, 0, (IntPtr)Store->Continuous, acting * ContinuousSize);
            Marshal.Copy(DiscreteActions, 0, (IntPtr)Store->Discrete, acting * branches.Length);
            Tidemill.Store.Drop(Store);
            if (Actuator != null)
            {
                for (int row = 0; row < acting; row++)
                {
                    Actuator.Act(new ActionEvent(this, actingAgents[row], row));
                }
            }
        }

        /// <summary>Let the heuristic choose all actions.</summary>
        internal void Decide()
        {
            Array.Clear(ContinuousActions, 0, DecisionCount * ContinuousSize);
            Array.Clear(DiscreteActions, 0, DecisionCount * branches.Length);
            if (Heuristic != null)
            {
                for (int k = 0; k < Observations.Length; k++)
                {
                    Observations[k] = Observations[k] ?? new float[MaxAgents * ObservationSizes[k]];
                    Marshal.Copy((IntPtr)Tidemill.Store.Observation(Store, &Store->Decisions, 0, k), Observations[k], 0, DecisionCount * ObservationSizes[k]);
                }
                for (int row = 0; row < DecisionCount; row++)
                {
                    Heuristic(new Decision(this, row));
                }
            }
            ActionsArrived();
        }

        private static void CheckName(string name)
        {
            bool good = name != null && name.Length >= 1 && name.Length <= Layout.MaxName;
            for (int i = 0; good && i < name.Length; i++)
            {
                good = name[i] >= ' ' && name[i] <= '~';
            }
            if (!good)
            {
                throw new BridgeException("The world's name '" + name + "' should have 1 to " + Layout.MaxName + " ASCII characters.");
            }
        }

        private static int SizeOf(string name, int k, int[] shape)
        {
            Require(shape != null && shape.Length >= 1 && shape.Length <= 3, name, "observation " + k + " should have one to three sizes");
            long size = 1;
            foreach (int length in shape)
            {
                Require(length >= 1, name, "a size of observation " + k + " is " + length + "; it should be 1 at least");
                size *= length;
                Require(size < int.MaxValue, name, "observation " + k + " is too large");
            }
            return (int)size;
        }

        private static void Require(bool condition, string name, string message)
        {
            if (!condition)
            {
                throw new BridgeException("The world '" + name + "': " + message + ".");
            }
        }
    }
}
